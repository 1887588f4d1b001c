from pathlib import Path
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
@pytest.mark.parametrize("topology", ["ddp","fsdp2"])
def test_samples(train, small_recipe, tmp_path, topology):
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(61)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w60").save_pretrained(tmp_path/"tok")
    small_recipe["data"]["tokenizer"]=str(tmp_path/"tok")
    small_recipe["evaluate"]={"every":3,"samples":["w1 w2",""],"sample_tokens":8}
    small_recipe["train"]={"steps":4}
    small_recipe["batch"]["microbatch"]="auto"
    f=train(recipe=small_recipe, launch=["--config_file",f"accelerate_configs/{topology}.yaml","--mixed_precision","bf16"],ACCELERATE_USE_CPU="true")
    print(f.output[-6000:])
    assert f.status==0
