"""Write recipes/schema.json from the settings classes: `make docs`.

The file is a JSON schema of recipes, for editors. An editor with a YAML language server, such as
VS Code with the YAML extension, then completes keys, shows their documentation, and marks mistakes.

The schema accepts every recipe that the launcher accepts. So no key is required, and a section may
be empty, because the command line or the recipe of `base` may set its keys. Only the launcher
checks combinations of keys.
"""

from __future__ import annotations

from typing import Any

from pydantic.json_schema import GenerateJsonSchema

from docs.settings_page import one_line, option_defaults
from packing.settings import WeightedSource
from pretrain.precision.settings import OPTIONS, PrecisionPhase
from pretrain.settings.recipe import Recipe

FILE = "recipes/schema.json"
# First line of a recipe in recipes/. The path is relative to the recipe.
MODELINE = "# yaml-language-server: $schema=schema.json"
BASE = "Recipe that this recipe includes. The path is relative to this file."
# Classes of the elements of lists. No other recipe can set a key of an element, so the required
# keys of an element are required in the schema.
ELEMENTS = (PrecisionPhase, WeightedSource)
# Numbers that the launcher reads, but that an editor reads as text: 1_000 and "1e-4".
NUMBER = {
    "type": "string",
    "pattern": r"^\s*[-+]?(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)([eE][-+]?\d+)?\s*$",
}
WORDS = ("true", "false", "yes", "no", "on", "off", "y", "n", "t", "f")
IN_ANY_CASE = "|".join("".join(f"[{c}{c.upper()}]" for c in word) for word in WORDS)
# Other spellings of true and false that the launcher reads. An editor may read `yes` as text.
BOOLEAN = {"type": "string", "pattern": f"^({IN_ANY_CASE}|0|1)$"}

Schema = dict[str, Any]


class RecipeSchema(GenerateJsonSchema):
    """pydantic's generator, with all spellings of values that the launcher accepts."""

    def int_schema(self, schema: Any) -> Schema:
        return {"anyOf": [super().int_schema(schema), NUMBER]}

    def float_schema(self, schema: Any) -> Schema:
        return {"anyOf": [super().float_schema(schema), NUMBER]}

    def bool_schema(self, schema: Any) -> Schema:
        return {"anyOf": [super().bool_schema(schema), BOOLEAN]}

    def literal_schema(self, schema: Any) -> Schema:
        values = super().literal_schema(schema)
        # YAML reads `on` and `off` as true and false.
        if "on" in schema["expected"]:
            return {"anyOf": [values, {"type": "boolean"}]}
        return values

    def model_schema(self, schema: Any) -> Schema:
        section = super().model_schema(schema)
        del section["title"]
        if schema["cls"] not in ELEMENTS:
            section["type"] = ["object", "null"]
            section.pop("required", None)
        for value in [section, *section["properties"].values()]:
            if "description" in value:
                value["description"] = one_line(value["description"])
            # The schema of a section has the defaults of its keys.
            if isinstance(value.get("default"), dict):
                del value["default"]
        return section

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def recipe_schema() -> Schema:
    """Return the JSON schema of a recipe."""
    schema = Recipe.model_json_schema(schema_generator=RecipeSchema)
    options = schema["$defs"]["LowPrecisionSettings"]["properties"]
    for key in OPTIONS:
        options[key]["description"] += f" Default: {option_defaults(key)}."
        del options[key]["default"]
    base = {"description": BASE, "type": ["string", "null"]}
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Recipe",
        **schema,
        "properties": {"base": base, **schema["properties"]},
    }
