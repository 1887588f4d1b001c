"""What a user types and writes: recipes, command lines, accelerate's variables, all of them up to the end of --plan."""

from __future__ import annotations

import base64
import contextlib
import io
import os
import random
import sys
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import yaml
from accelerate.state import AcceleratorState
from pydantic import BaseModel

import train_accelerate
from foundation.errors import InputError
from pretrain.settings.recipe import Recipe
from tests.fuzz.damage import Spec, do_damage, draw_damage

VALUES = (
    *("null", "true", "-1", "0", "1", "0.5", "1e38", "1e300", "1e308", ".inf", "-.inf", ".nan", '""', "text", "[]", "[1, 2]"),
    *("{}", "{a: 1}", "'9'", "9223372036854775807", "99999999999999999999", "100000", "bf16", "/dev/zero", "swiglu", "{name.x}"),
    *("'{seed:>2000000000}'", "2001-01-01", "'ü'", "[[[[[[]]]]]]", "{Every: 2}", "-0.0", "../..", "[null]", "'\\ud800'"),
)
OPTIONS = ("--plan", "--resume", "--resume=", "--profile", "--accept-changes", "--tokens-per-second=0", "--tokens-per-second=x")
OPTIONS += (
    "--tokens-per-second=1e308",
    "--preview-schedule=/dev/full",
    "--preview-schedule=x",
    "--nonsense",
    "--gpus=16",
    "--nodes=0",
    "--network-gbps=x",
    "--resume=/dev/zero",
)
KEYS = ("Seed", "int", "a[0]", "none", "data.Seed", "a..b", ".", "..", "model.config.x.y", "name.x", "data", "model.[key]", "ü")
VARIABLES = {
    "ACCELERATE_MIXED_PRECISION": ("fp8", "bf16", "fp16", "no", "", "x"),
    "ACCELERATE_FP8_RECIPE": ("mxfp8", "DELAYED", "bf16", "x", ""),
    "ACCELERATE_FP8_BACKEND": ("TE", "te", "AO", "MSAMP", "emulation", "x", ""),
    "ACCELERATE_FP8_FORMAT": ("HYBRID", "E4M3", "x"),
    "ACCELERATE_FP8_MARGIN": ("0", "-1", "1e308", "x"),
    "ACCELERATE_FP8_AMAX_HISTORY_LEN": ("1024", "0", "999999999999999999999"),
    "ACCELERATE_FP8_KEEP_BF16_LAYERS": ("{'first': 1}", "{'first': 1", "3", "{'first': -1}", "[" * 5000),
    "ACCELERATE_FP8_SCOPE": ("linear+head", "all"),
    "ACCELERATE_FP8_ON_UNSUPPORTED": ("emulate", "fallback", "x"),
    "ACCELERATE_FP8_OVERRIDE_FPROP": ("True", "x"),
    "ACCELERATE_FP8_INTERVAL": ("2", "x"),
    "ACCELERATE_FP8_X": ("1", ""),
    "ACCELERATE_DYNAMO_BACKEND": ("inductor", "no", "x", ""),
    "ACCELERATE_USE_FSDP": ("true", "x"),
    "FSDP_VERSION": ("1", "2", "x"),
    "ACCELERATE_USE_DEEPSPEED": ("true", "x"),
    "ACCELERATE_USE_MEGATRON_LM": ("true", "x"),
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": ("2", "x", ""),
    "ACCELERATE_USE_CPU": ("true", "x", ""),
    "ACCELERATE_USE_PARALLELISM_CONFIG": ("true",),
    "ACCELERATE_DEBUG_MODE": ("true", "x"),
    "ACCELERATE_TORCH_DEVICE": ("cpu", "cuda:99", "meta", "x", ""),
    "WORLD_SIZE": ("x", "-1", "0", ""),
    "MASTER_ADDR": ("127.0.0.1", ""),
}


@cache
def keys_of_a_recipe() -> tuple[str, ...]:
    def below(cls: type[BaseModel], prefix: str) -> list[str]:
        keys = []
        for name, field in cls.model_fields.items():
            keys.append(f"{prefix}{name}")
            if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
                keys += below(field.annotation, f"{prefix}{name}.")
        return keys

    config = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")
    config += ("intermediate_size", "hidden_act", "dtype", "pad_token_id", "eos_token_id", "bos_token_id", "rope_parameters")
    config += ("max_position_embeddings", "tie_word_embeddings", "layer_types", "sliding_window", "rms_norm_eps", "model_type")
    config += ("attention_bias", "attention_dropout", "initializer_range", "use_cache", "rope_theta", "architectures", "id2label")
    return (*below(Recipe, ""), *(f"model.config.{key}" for key in config))


class Launches:
    """The kinds that end in --plan, on a `recipe` (plain values) that is right."""

    def __init__(self, recipe: dict[str, Any]) -> None:
        self.recipe = recipe
        self.text = yaml.safe_dump(recipe)

    def plan(self, path: Path, *arguments: str, **environment: str) -> None:
        """`train_accelerate.py path --plan arguments`; InputError with its message where it ends with status 2."""
        out, err = io.StringIO(), io.StringIO()
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("ACCELERATE_", "FSDP_"))}
        environment = {"ACCELERATE_USE_CPU": "true"} | environment
        AcceleratorState._reset_state(reset_partial_state=True)
        with (
            mock.patch.dict(os.environ, kept | environment, clear=True),
            mock.patch.object(sys, "argv", ["train_accelerate.py", str(path), "--plan", *arguments]),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            status = train_accelerate.main()
        if status == 2 and "error: " in err.getvalue():
            raise InputError(err.getvalue().partition("error: ")[2])
        if status:
            raise AssertionError(f"status {status}: {err.getvalue()[-1000:]}")

    def run_text(self, spec: Spec, folder: Path) -> None:
        path = folder / "recipe.yaml"
        path.write_bytes(base64.b64decode(spec["yaml"]))
        if spec.get("as"):
            do_damage(path, {"how": "stand-in", "as": spec["as"], "at": 0.0})
        self.plan(path)

    def run_arguments(self, spec: Spec, folder: Path) -> None:
        path = folder / "recipe.yaml"
        path.write_text(yaml.safe_dump(self.recipe | {"run_dir": str(folder / "run")}))
        self.plan(path, *spec["arguments"], **spec.get("environment", {}))

    def draw_key(self, rng: random.Random) -> Spec:
        return {"key": rng.choice(keys_of_a_recipe()), "value": rng.choice(VALUES)}

    def run_key(self, spec: Spec, folder: Path) -> None:
        recipe = yaml.safe_load(self.text)
        *sections, name = spec["key"].split(".")
        holder = recipe
        for section in sections:
            holder = holder.setdefault(section, {})
        holder.pop(name, None)
        text, path = yaml.safe_dump(recipe), folder / "recipe.yaml"
        # The value stands in the file as it is written here, not as a YAML library would write it.
        holder[name] = "THE-VALUE"
        text = yaml.safe_dump(recipe).replace("THE-VALUE", spec["value"])
        path.write_text(text)
        self.plan(path)

    def draw_yaml(self, rng: random.Random) -> Spec:
        text = bytearray(self.text.encode())
        for _ in range(rng.choice([1, 1, 3])):
            at = rng.randrange(len(text) + 1)
            match rng.randrange(9):
                case 0 | 1 if at < len(text):
                    text[at] ^= 1 << rng.randrange(8)
                case 2:
                    del text[at:]
                    text += b"\n"
                case 3:
                    tag = rng.choice(
                        ["!!python/object/apply:os.system [x]", "!!int x", "!!timestamp x", "!!binary x", "!x y", "!!set {a}"]
                    )
                    text += f"\nname: {tag}\n".encode()
                case 4:
                    bomb = "".join(f"l{i}: &l{i} [{', '.join([f'*l{i - 1}'] * 9)}]\n" for i in range(1, rng.randrange(3, 40)))
                    text[:0] = f"l0: &l0 [x]\n{bomb}".encode()
                case 5:
                    deep = rng.choice([10, 63, 64, 65, 1000, 20000])
                    text += (
                        b"\nname: " + rng.choice([b"[" * deep, b"[" * deep + b"]" * deep, b"{a: " * deep + b"}" * deep]) + b"\n"
                    )
                case 6:
                    odd = [
                        "? [a]\n: b",
                        "? {a: 1}\n: b",
                        "seed: " + "9" * 5000,
                        "x: &x [*x]",
                        "&a a: *a",
                        "seed: 2001-99-99",
                        "<<: *q",
                    ]
                    odd += [
                        "seed: " + ":".join(["59"] * 300),
                        '"\\0": 1',
                        "1: 2",
                        "~: 1",
                        "%YAML 9.9",
                        "---\na: 1",
                        "\t- a",
                        "0x: 0b_",
                    ]
                    text += f"\n{rng.choice(odd)}\n".encode()
                case 7:
                    text[at:at] = rng.randbytes(rng.randrange(1, 9))
                case 8:
                    text[at:at] = rng.choice(["\u2028", "\ufeff", "ü", "\x00", "\x85"]).encode()
        spec: Spec = {"yaml": base64.b64encode(bytes(text)).decode()}
        return spec | ({"as": draw_damage(rng)["as"]} if rng.random() < 0.1 else {})

    def draw_arguments(self, rng: random.Random) -> Spec:
        def one() -> str:
            if rng.random() < 0.2:
                return rng.choice(OPTIONS)
            key = rng.choice(KEYS) if rng.random() < 0.3 else rng.choice(keys_of_a_recipe())
            value = rng.choice([*VALUES, "[" * 3000, "9" * 5000, "*a", "&a [*a]", "x=y", "!!int x", "\udcff", "{a: [}"])
            return rng.choice([f"{key}={value}"] * 8 + [key, f"{key}=", f"={value}"])

        return {"arguments": [one() for _ in range(rng.choice([1, 1, 1, 2]))]}

    def draw_environment(self, rng: random.Random) -> Spec:
        chosen = {name: rng.choice(VARIABLES[name]) for name in rng.sample(list(VARIABLES), rng.choice([1, 2, 3]))}
        if any(name.startswith("ACCELERATE_FP8") for name in chosen):
            chosen["ACCELERATE_MIXED_PRECISION"] = "fp8"
        return {"arguments": [], "environment": chosen}
