"""Write a folder for fp4pass serve and engines, and look into it."""

# --8<-- [start:imports]
import json
import subprocess
import sys
from pathlib import Path

import torch
from openai import OpenAI
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

import fp4pass

# --8<-- [end:imports]

# --8<-- [start:save]
tokenizer = AutoTokenizer.from_pretrained("examples/tiny_lm")
model = AutoModelForCausalLM.from_pretrained("examples/tiny_lm", dtype="auto")
fp4pass.convert(model, "nvfp4a16", "sse")
fp4pass.save(model, "out/served", tokenizer=tokenizer, overwrite=True)
# --8<-- [end:save]

# --8<-- [start:start]
# "fp4pass serve out/served" at a free port; it prints where, once it answers.
options = ["out/served", "--port", "0"]
command = [sys.executable, "-m", "fp4pass", "serve", *options]
server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
address = server.stdout.readline().split()[-1]
# --8<-- [end:start]

# --8<-- [start:ask]
client = OpenAI(base_url=address, api_key="none")
print([each.id for each in client.models.list().data])
answer = client.completions.create(
    model="served", prompt="The function returns a", max_tokens=8, temperature=0
)
print(answer.choices[0].text)
# --8<-- [end:ask]

# --8<-- [start:same]
client.close()
server.terminate()
server.communicate()
prompt = tokenizer("The function returns a", return_tensors="pt")
ids = model.generate(**prompt, max_new_tokens=8, do_sample=False)[
    0, prompt.input_ids.shape[1] :
]
answered = answer.choices[0].text == tokenizer.decode(
    ids, skip_special_tokens=True
)
print(f"the server answers as generate does: {answered}")
# --8<-- [end:same]

# --8<-- [start:check]
config = json.loads(Path("out/served/config.json").read_text())[
    "quantization_config"
]
print(config["quant_method"], config["format"], "ignores", config["ignore"])
with safe_open("out/served/model.safetensors", "pt") as file:
    names = sorted(
        name for name in file.keys() if ".layers.0.self_attn.q_proj." in name
    )
print(*names, sep="\n")
# --8<-- [end:check]

# --8<-- [start:transformers]
served = AutoModelForCausalLM.from_pretrained("out/served", dtype="auto")
same = torch.equal(served(**prompt).logits, model(**prompt).logits)
print(f"stock transformers gives the same logits: {same}")
# --8<-- [end:transformers]
