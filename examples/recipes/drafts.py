"""Generate several tokens a step: a packed model checks drafts."""

# --8<-- [start:load]
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import fp4pass

MODEL = "examples/tiny_lm"
tokenizer = AutoTokenizer.from_pretrained(MODEL)


def packed():
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    return fp4pass.convert(model, "nvfp4a16", "sse")


model = packed()
prompt = tokenizer(
    "Return a list of the names, a list of the", return_tensors="pt"
)
options = {"max_new_tokens": 32, "do_sample": False}
plain = model.generate(**prompt, **options)
# --8<-- [end:load]

# --8<-- [start:lookup]
# Four tokens that stood behind the last ones before.
found = model.generate(**prompt, prompt_lookup_num_tokens=4, **options)
same = torch.equal(found, plain)
print("the same tokens with drafts of the prompt:", same)
# --8<-- [end:lookup]

# --8<-- [start:assistant]
# Usually a smaller model with the same tokenizer.
draft = packed()
draft.generation_config.num_assistant_tokens = 4
draft.generation_config.num_assistant_tokens_schedule = "constant"
found = model.generate(**prompt, assistant_model=draft, **options)
print("the same tokens with drafts of a model:", torch.equal(found, plain))
# --8<-- [end:assistant]
