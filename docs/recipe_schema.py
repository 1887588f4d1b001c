"""Write recipes/schema.json from the settings classes: `make docs`.

The file is a JSON schema of recipes, for editors. An editor with a YAML language server, such as
VS Code with the YAML extension, then completes keys, shows their documentation, and marks mistakes.

The schema accepts every recipe that the launcher accepts. So no key is required, and a section may
be empty, because the command line or the recipe of `base` may set its keys. Only the launcher
checks combinations of keys.
"""

from __future__ import annotations

import inspect
import json
from typing import Any

from pydantic import BaseModel

from docs.settings_page import comments, option_defaults
from foundation.settings import sections_in
from pretrain.precision.settings import LowPrecisionSettings
from pretrain.settings.recipe import Recipe

FILE = "recipes/schema.json"
# First line of a recipe in recipes/. The path is relative to the recipe.
MODELINE = "# yaml-language-server: $schema=schema.json"
BASE = "Recipe that this recipe includes. The path is relative to this file."
# Constraints of values that editors check. `title` and `format` are omitted.
CONSTRAINTS = (
    *("type", "enum", "const", "pattern", "minLength", "minItems", "maxItems"),
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
)
# Numbers that the launcher reads, but that an editor reads as text: 1_000 and "1e-4".
NUMBER = {
    "type": "string",
    "pattern": r"^\s*[-+]?(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)([eE][-+]?\d+)?\s*$",
}
WORDS = ("true", "false", "yes", "no", "on", "off", "y", "n", "t", "f")
IN_ANY_CASE = "|".join("".join(f"[{c}{c.upper()}]" for c in word) for word in WORDS)
# Other spellings of true and false that the launcher reads. An editor may read `yes` as text.
BOOLEAN = {"type": "string", "pattern": f"^({IN_ANY_CASE}|0|1)$"}


def recipe_schema() -> dict[str, Any]:
    """Return the JSON schema of a recipe."""
    schema = Recipe.model_json_schema()
    definitions = schema.pop("$defs")
    section = section_schema(Recipe, schema, definitions)
    base = {"description": BASE, "type": ["string", "null"]}
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Recipe",
        **section,
        "properties": {"base": base, **section["properties"]},
    }


def section_schema(
    cls: type[BaseModel], schema: dict[str, Any], definitions: dict[str, Any]
) -> dict[str, Any]:
    """Return the schema of a settings class, with the documentation of each key.

    `schema` is the schema of `cls` by pydantic. `definitions` are those to which it refers.
    """
    meanings = comments(cls)
    properties = {}
    for name, field in cls.model_fields.items():
        classes = {section.__name__: section for section in sections_in(field.annotation)}
        source = schema["properties"][name]
        value = value_schema(source, definitions, classes)
        if meaning := meanings.get(name):
            value["description"] = meaning
        if cls is LowPrecisionSettings and (defaults := option_defaults(name)):
            value["description"] += f" Default: {defaults}."
        elif not isinstance(source.get("default", {}), dict):
            value["default"] = source["default"]
        properties[name] = value
    text = " ".join(inspect.cleandoc(vars(cls).get("__doc__") or "").split())
    return {
        **({"description": text} if text else {}),
        "type": ["object", "null"],
        "additionalProperties": False,
        "properties": properties,
    }


def value_schema(
    source: dict[str, Any], definitions: dict[str, Any], classes: dict[str, type[BaseModel]]
) -> dict[str, Any]:
    """Return the schema of a value that accepts all spellings that the launcher accepts.

    Args:
        source: The schema of the value by pydantic.
        definitions: The schemas by pydantic of all settings classes, by name.
        classes: The settings classes to which `source` may refer, by name.
    """
    if reference := source.get("$ref"):
        name = reference.rpartition("/")[2]
        return section_schema(classes[name], definitions[name], definitions)
    if members := source.get("anyOf") or source.get("oneOf"):
        schemas = [value_schema(member, definitions, classes) for member in members]
        # Replace a union in the union by its members.
        return {"anyOf": [part for schema in schemas for part in schema.get("anyOf", [schema])]}
    schema = {key: source[key] for key in CONSTRAINTS if key in source}
    kind = source.get("type")
    if kind == "array":
        # The elements of a tuple, as of optimizer.betas, have equal schemas.
        item = source.get("items") or source["prefixItems"][0]
        return schema | {"items": item_schema(item, definitions, classes)}
    if kind in ("integer", "number"):
        return {"anyOf": [schema, NUMBER]}
    if kind == "boolean":
        return {"anyOf": [schema, BOOLEAN]}
    if "on" in schema.get("enum", ()):
        return {"anyOf": [schema, {"type": "boolean"}]}
    return schema


def item_schema(
    source: dict[str, Any], definitions: dict[str, Any], classes: dict[str, type[BaseModel]]
) -> dict[str, Any]:
    """Return the schema of an element of a list.

    No other recipe can set a key of an element, so its required keys are required in the schema.
    """
    schema = value_schema(source, definitions, classes)
    if reference := source.get("$ref"):
        required = definitions[reference.rpartition("/")[2]]["required"]
        schema |= {"type": "object", "required": required}
    return schema


if __name__ == "__main__":
    print(json.dumps(recipe_schema(), indent=1, ensure_ascii=False))
