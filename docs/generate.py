"""Write the generated files, tables and pictures of the documentation: `make docs`.

Some files are generated as a whole. Other pages have generated tables between two marks, such as
<!-- evidence --> and <!-- /evidence -->, and the rest of such a page is written by hand.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from benchmarks import readers
from benchmarks.machine import with_tables
from docs import (
    charts,
    diagrams,
    drawing,
    evidence_page,
    gpus_page,
    recipe_schema,
    recipes_page,
    results_page,
    settings_page,
    studies_page,
)

DOCS = Path(__file__).parent


def outputs() -> Iterator[tuple[Path, str]]:
    """Yield each file of the documentation that has a generated part, with its new text.

    A page with several tables is yielded once for each table, which is the only part that changes.
    """
    yield DOCS / "settings.md", settings_page.page()
    yield DOCS / "recipes.md", recipes_page.page()
    schema = json.dumps(recipe_schema.recipe_schema(), indent=1, ensure_ascii=False)
    yield DOCS.parent / recipe_schema.FILE, f"{schema}\n"
    for page, marks, table in tables():
        yield page, with_tables(page, marks, table)
    for name, draw in {
        "speed": charts.speed,
        "loss": charts.loss,
        "length": charts.length,
        "evidence": charts.evidence,
        "exact_weights": diagrams.exact_weights,
        "packing": diagrams.packing,
        "choice": diagrams.choice,
    }.items():
        yield drawing.FOLDER / f"{name}.svg", drawing.svg(draw)


def tables() -> Iterator[tuple[Path, str, str]]:
    """Yield each page with a generated table, the name of its marks, and the table."""
    studies = DOCS / "studies"
    results = DOCS / "developers/results.md"
    yield gpus_page.PAGE, "gpus", gpus_page.table()
    yield DOCS / "evidence.md", "evidence", evidence_page.table()
    yield studies / "muon.md", "muon", studies_page.muon()
    yield studies / "served.md", "served-in", studies_page.served_in()
    yield studies / "served.md", "last-part", studies_page.last_part()
    yield studies / "statistics.md", "misses", studies_page.misses()
    yield studies / "statistics.md", "extra-tokens", studies_page.extra_tokens()
    yield results, "trainers", results_page.trainers()
    yield results, "several-gpus", results_page.several_gpus()
    yield results, "card", results_page.card_table()
    yield DOCS / "developers/distributed.md", "lost-time", results_page.lost_time()
    yield DOCS / "developers/speed.md", "kernels", results_page.kernels()
    content = json.loads(readers.RESULTS.read_text(encoding="utf-8"))
    yield DOCS / "serving.md", "readers", readers.table(content["rows"])


if __name__ == "__main__":
    for path, text in outputs():
        path.write_text(text, encoding="utf-8")
