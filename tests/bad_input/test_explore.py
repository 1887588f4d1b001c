import json, shutil, os, copy
from pathlib import Path
import numpy as np, pytest, yaml
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

def show(name, f):
    try:
        m = f()
    except SystemExit as e:
        m = f"SystemExit {e.code}"
    except BaseException as e:
        m = f"!!! {type(e).__name__}: {str(e)[:1500]}"
    with open("/tmp/messages.txt","a") as fh: fh.write(f"## {name}\n{m}\n\n")

CASES = {
 "mistyped": ["optimizer.learnin_rate=1"], "top": ["weigths=bf16"], "type": ["train.steps=many"], "range": ["optimizer.learning_rate=-1"],
 "noeq": ["weights"], "delayed": ["precision=delayed"], "bf16fp32": ["weights=bf16","precision=fp32"],
 "varlen": ["model.attention=varlen"], "flash": ["model.attention=flash_attn"], "cce": ["loss.kind=cce"],
 "tracker": ["log.trackers=[wandbb]"], "tracker2": ["log.trackers=[clearml]"], "samples": ["evaluate.samples=[hello]"],
 "samples2": ["evaluate.samples=hello"],
 "batch": ["batch.tokens=250"], "micro": ["batch.microbatch=3"], "micro0": ["batch.microbatch=0"], "len": ["data.length=64"], "len2": ["data.length=128", "batch.tokens=1280"],
 "pos": ["model.config.max_position_embeddings=16"],
 "modelkey": ["model.config.hiden_size=32"], "modeltype": ["model.config.model_type=qwen33"],
 "modelfolder": ["model.source=/nowhere/model"], "modelfolder2": ["model.source=no/such"],
 "packs": ["data.packs=/nowhere/packs"], "vocab": ["model.config.vocab_size=50"],
 "horizon2": ["train.epochs=0"], "horizon3":["train={steps: 3, tokens: 5}"], "bert": ["model.config={model_type: bert, vocab_size: 61}"], "t5": ["model.config={model_type: t5, vocab_size: 61}"],
 "mamba": ["model.config={model_type: mamba, vocab_size: 61}"], "badval": ["model.config.hidden_size=abc"], "heads": ["model.config.num_attention_heads=3"],
 "warm": ["schedule.warmup=100"], "evalnone": ["data.held_out=0", "evaluate.every=3"], "rundir": ["run_dir=/tmp/{nam}"], "rundirfile": ["run_dir=/etc/passwd"],
 "norecipe": None, "resume": ["--resume", "/nowhere"], "resume2": ["--resume", "/tmp"], "gpt2": ["model.config={model_type: gpt2, vocab_size: 61}"],
 "tokps": ["--tokens-per-second", "0"], "preview": ["--preview-schedule", "/nowhere/x.png"], "preview2": ["--preview-schedule", "/tmp/x.foo"],
 "tokmissing": ["data.tokenizer=/nowhere/tok.json"], "srcmissing": ["data.tokenizer=/nowhere/tok.json", "data.source=/nowhere/a.jsonl", "data.packs=/tmp/nn/packs"],
}
@pytest.mark.parametrize("name", CASES)
def test_cases(name, refusal, small_recipe):
    if CASES[name] is None: return
    show(name, lambda: refusal(*CASES[name], begun=True))

def test_fp16(refusal, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION","fp16")
    show("fp16", lambda: refusal())
def test_fp8(refusal, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION","fp8")
    show("fp8", lambda: refusal())

def tok(folder, words):
    folder.mkdir(parents=True, exist_ok=True)
    t = Tokenizer(WordLevel({w:i for i,w in enumerate(words)}, unk_token=words[0])); t.pre_tokenizer = Whitespace()
    t.save(str(folder/"tokenizer.json")); return folder/"tokenizer.json"

def test_data(refusal, small_recipe, tmp_path):
    t = tok(tmp_path/"tok", ["<|endoftext|>", "a","b","c"])
    d = small_recipe["data"]; d["packs"] = str(tmp_path/"p"); d["tokenizer"]=str(t)
    src = tmp_path/"s.jsonl"; d["source"]=str(src)
    d["held_out"]=0.2
    good = json.dumps({"text":"a b c "*20})
    def with_text(content, name, **kw):
        src.write_text(content)
        small_recipe["data"] = {**d, **kw}
        show(name, lambda: refusal())
    with_text("", "empty")
    with_text("\n\n", "blank lines")
    with_text(good+"\n{\"text\": \n"+good+"\n", "malformed")
    with_text("\n".join([good]*3), "column", text="body")
    with_text("\n".join([good]*3), "template", text="{title} {text}")
    with_text('{"text": 5}\n', "type")
    with_text('{"text": ""}\n', "emptytext")
    with_text("{bad\n", "all skipped", on_bad_line="skip")
    with_text(good+"\n", "one doc held out")
    src.write_text(""); src.chmod(0); 
    (tmp_path/"tok"/"tokenizer.json").write_text("{nope")
    with_text(good, "tok broken")
    (tmp_path/"tok"/"tokenizer.json").write_text("{}")
    with_text(good, "tok broken2")
    d["tokenizer"]=str(tmp_path)
    with_text(good, "tok folder empty")
    d["tokenizer"]="no-such-tokenizer"
    with_text(good, "tok hub")
    d["source"]=str(tmp_path/"nothing.jsonl"); d["tokenizer"]=str(t); tok(tmp_path/"tok", ["<|endoftext|>", "a","b","c"])
    small_recipe["data"]=d
    show("source missing", lambda: refusal())
    small_recipe["data"]={**d, "source": "nobody/nothing"}
    show("source hub", lambda: refusal())
    small_recipe["data"]={**d, "source": str(tmp_path/"tok")}
    show("source folder", lambda: refusal())
    e = tmp_path/"emptyf"; e.mkdir()
    small_recipe["data"]={**d, "source": str(e)}
    show("source empty folder", lambda: refusal())
    small_recipe["data"]={**d, "source": str(src), "packs": "/proc/x/packs"}
    show("packs unwritable", lambda: refusal())
