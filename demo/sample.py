"""Let an exported model continue a text: `python -m demo.sample runs/smoke/final "def "`.

It knows nothing of this repository: transformers loads the folder, so what works here works wherever the folder is taken.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from foundation.command import CommandParser, number, run_command
from foundation.errors import InputError
from foundation.settings import MOST

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def load(folder: Path) -> tuple[PreTrainedTokenizerBase, PreTrainedModel]:
    """The tokenizer and the model, in FP32 on the CPU, of a Hugging Face folder."""
    import torch  # slow to import, as transformers is: what is wrong with the command line is said at once
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # a small model is there at once, and a bar would stand in a log
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return AutoTokenizer.from_pretrained(folder), model.eval()


def sample(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel, prompt: str, tokens: int, seed: int = 0) -> str:
    """`prompt` and up to `tokens` tokens more, drawn at temperature 0.7 from the 50 likeliest; the same seed, the same text."""
    import torch

    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    torch.manual_seed(seed)
    with torch.inference_mode():
        output = model.generate(**inputs, max_new_tokens=tokens, do_sample=True, temperature=0.7, top_k=50)
    return tokenizer.decode(output[0], skip_special_tokens=True)


def main() -> None:
    parser = CommandParser(prog="python -m demo.sample", description="Continue a text with an exported model.")
    parser.add_argument("folder", type=Path, help="a Hugging Face folder, such as runs/smoke/final")
    parser.add_argument("prompt")
    parser.add_argument("--tokens", type=number(1, whole=True), default=100, help="at most this many new ones (default: 100)")
    parser.add_argument("--seed", type=number(0, MOST, whole=True), default=0, help="another seed, another text")
    arguments = parser.parse_intermixed_args()
    if not (arguments.folder / "config.json").is_file():
        raise InputError(
            f"{arguments.folder}: no Hugging Face folder (it has no config.json); a finished run has one as <run>/final"
        )
    print(sample(*load(arguments.folder), arguments.prompt, arguments.tokens, arguments.seed))


if __name__ == "__main__":
    sys.exit(run_command(main, on_ctrl_c="stopped by Ctrl-C"))
