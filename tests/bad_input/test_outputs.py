"""Files that a command is told to write: its own are written anew, and nobody else's are written over."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from foundation.errors import InputError
from foundation.files import MARKDOWN_MARK, check_replaceable
from pretrain.__main__ import main
from pretrain.optimizer.schedule import preview
from pretrain.run.doctor import parse
from pretrain.settings.recipe import OptimizerSettings, ScheduleSettings
from tests.pretrain.compare.made_runs import make_run


@pytest.fixture
def runs(tmp_path: Path) -> list[str]:
    return [str(make_run(tmp_path / "runs" / name)) for name in ("one", "two")]


def write_notes(path: Path) -> bytes:
    """A file of the user's at `path`, of the kind that its name says; returns its content."""
    if path.suffix == ".png":
        Figure().savefig(path)
    else:
        path.write_text("<html><title>my report</title></html>" if path.suffix == ".html" else "# What I think of the report\n")
    return path.read_bytes()


@pytest.mark.parametrize(
    ("option", "name", "lost"),
    [
        ("--out", "notes.html", "notes.html"),
        ("--out", "notes.png", "notes.png"),
        ("--out", "notes.md", "notes.md"),
        ("--out", "notes.md", "notes.png"),  # the picture in it
        ("--markdown", "notes.md", "notes.md"),
        ("without --out,", "", "runs/comparison.png"),
    ],
)
def test_a_report_is_written_over_itself_and_over_no_other_file(
    option: str, name: str, lost: str, runs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs, asked = tmp_path / lost, ["report", *runs, *([option, str(tmp_path / name)] if name else [])]
    content = write_notes(theirs)
    assert main(asked) == 2 and theirs.read_bytes() == content
    said = capsys.readouterr().err
    assert f"error: {option.removesuffix(',')}" in said and f"{theirs}: is a file that no command here has written, so" in said
    theirs.write_bytes(b"")  # as `mktemp` makes it
    for _ in range(2):
        assert main(asked) == 0, capsys.readouterr().err
    assert theirs.stat().st_size > 0


def test_a_report_that_is_a_link_stays_one(runs: list[str], tmp_path: Path) -> None:
    (page := tmp_path / "report.html").symlink_to(real := tmp_path / "real.html")
    for _ in range(2):
        assert main(["report", *runs, "--out", str(page)]) == 0 and page.is_symlink() and real.stat().st_size > 10_000


def test_a_page_of_an_older_version_is_written_anew(runs: list[str], tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    page.write_text('<script>const kept = localStorage.getItem("report-theme");</script>')
    assert main(["report", *runs, "--out", str(page)]) == 0 and page.stat().st_size > 10_000


@pytest.mark.parametrize("place", ["first", "last"])
def test_a_mark_is_looked_for_at_both_ends_of_a_file_and_not_within(place: str, tmp_path: Path) -> None:
    text, path = b"x" * 10_000_000, tmp_path / "tables.md"
    mark = MARKDOWN_MARK.encode()
    path.write_bytes(mark + text if place == "first" else text + mark + b"\n")
    check_replaceable(path)
    path.write_bytes(text + mark + text)  # notes that quote it
    with pytest.raises(InputError, match=r"tables.md: is a file that no command here has written"):
        check_replaceable(path)


def test_other_outputs_are_written_over_nobodys_file_either(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    notes, picture = tmp_path / "notes.md", tmp_path / "picture.png"
    contents = [write_notes(path) for path in (notes, picture)]
    with pytest.raises(InputError, match=r"--out .*notes.md: is a file .* not written over; move it away, or give"):
        parse(["--full", "--out", str(notes)])
    assert main(["plan", "my.yaml", "--measure", "--out", str(picture)]) == 2
    assert f"--out {picture}: is a file that no command" in capsys.readouterr().err
    schedule = (ScheduleSettings(), OptimizerSettings(), 1000, 4096)
    with pytest.raises(InputError, match=r"--preview-schedule .*picture.png: is a file that no command"):
        preview(*schedule, picture)
    assert [path.read_bytes() for path in (notes, picture)] == contents
    for _ in range(2):
        assert preview(*schedule, tmp_path / "rate.png")


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    """A folder on a read-only disk."""
    (path := tmp_path / "read only").mkdir()
    if shutil.which("mount") is None or subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", path]).returncode:
        pytest.skip("mounting a file system needs root")
    yield path
    subprocess.run(["umount", path], check=True)


def test_what_cannot_be_written_in_the_end_is_refused_before_any_work(
    read_only: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for asked in (
        ["report", "no such run", "--out", f"{read_only}/page.html"],
        ["report", "no such run", "--markdown", f"{read_only}/tables.md"],
        ["plan", "my.yaml", "--measure", "--out", f"{read_only}/sizes.png"],
        ["doctor", "--full", "--out", f"{read_only}/doctor.md"],
    ):
        assert main(asked) == 2
        said = f"error: {' '.join(asked[-2:])}: cannot be written there: no permission, or a read-only disk; name another file\n"
        assert capsys.readouterr().err == said
    (link := read_only.with_name("link.md")).symlink_to(read_only / "doctor.md")
    assert main(["doctor", "--full", "--out", str(link)]) == 2
    assert f"error: --out {link}: cannot be written there" in capsys.readouterr().err


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
def test_what_is_there_and_is_no_file_is_refused_before_any_work(
    make: Callable[[Path], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make(path := tmp_path / "page.md")
    for asked in (["report", "no such run", "--out", str(path)], ["doctor", "--full", "--out", str(path)]):
        assert main(asked) == 2
        assert capsys.readouterr().err == f"error: --out {path}: is there and is no file; name another\n"
    assert not path.is_file()
