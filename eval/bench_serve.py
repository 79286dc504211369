"""How many tokens a second transformers' continuous batches write on a GPU, by number of clients.

    python eval/bench_serve.py [--kinds NAME...] [--clients N...] [--layers N] [--tiny]
        [--json FILE]

A model of the shape of Qwen3-4B with random weights, in this process, by what `transformers serve
--continuous-batching` serves with, without HTTP. Each client sends a prompt of 128 tokens, waits
for the 64 behind it, and sends the next; the time is from the first request to the last answer,
after a round that is not counted. Before that, the tokens of one request are compared with
`generate`.
"""

from __future__ import annotations

import argparse
import json
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from bench_generate import MODELS, build
from measuring import command, machine
from transformers import ContinuousBatchingConfig, GenerationConfig

import fp4pass

MODEL, PROMPT, NEW, ROUNDS = "Qwen3-4B", 128, 64, 2
KINDS: dict[str, Any] = {
    "bf16": lambda model: None,
    "nvfp4, lm_head too": partial(
        fp4pass.convert, method="naive", weight_only=True, rules=[("lm_head", {"fmt": "nvfp4"})]
    ),
}


def main() -> None:
    args = parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if args.layers:
        MODELS[MODEL][1]["num_hidden_layers"] = args.layers
    result: dict[str, Any] = {"command": command(None), **machine(device), "rows": []}
    for kind in args.kinds:
        model = build(MODEL, torch.device(device), args.tiny)
        KINDS[kind](model)
        for graphs in (False, True):
            for row in measure(model, args.clients, graphs):
                row = {
                    "model": MODEL,
                    "layers": model.config.num_hidden_layers,
                    "kind": kind,
                    **row,
                }
                result["rows"].append(row)
                print(row, flush=True)
                args.json.write_text(json.dumps(result, indent=1) + "\n")
        del model


@torch.no_grad()
def measure(model: Any, clients: list[int], graphs: bool) -> list[dict[str, Any]]:
    """Return a row for each number of clients."""
    greedy = GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0)
    generator = torch.Generator().manual_seed(0)
    vocabulary = model.config.vocab_size
    prompts = torch.randint(vocabulary, (max(clients), PROMPT), generator=generator).tolist()
    config = ContinuousBatchingConfig(
        page_size=32, num_blocks=512, max_batch_tokens=512, use_cuda_graph=graphs,
        q_padding_interval_size=8, allow_block_sharing=False,
    )  # fmt: skip
    rows = []
    with model.continuous_batching_context_manager(
        generation_config=greedy, continuous_batching_config=config
    ) as manager:

        def ask(ids: list[int]) -> list[int]:
            name = manager.add_request(ids, max_new_tokens=NEW)
            while (answer := manager.get_result(name, timeout=1)) is None:
                if not manager.is_running():
                    raise SystemExit("the thread that serves has ended")
            if answer.error:
                raise SystemExit(answer.error)
            return answer.generated_tokens

        first = ask(prompts[0])
        ids = torch.tensor(prompts[:1], device=model.device)
        alone = model.generate(ids, max_new_tokens=NEW, do_sample=False, eos_token_id=None)
        same = [a == b for a, b in zip(first, alone[0, PROMPT:].tolist(), strict=True)]
        # Of random weights texts part sooner or later where two logits are nearly equal.
        same_until = [*same, False].index(False)
        if same_until < 4:
            raise SystemExit(f"expected the tokens of generate, got {same_until} of them")
        for count in clients:
            with ThreadPoolExecutor(count) as pool:
                list(pool.map(ask, prompts[:count]))
                begin = time.perf_counter()
                answers = list(pool.map(ask, prompts[:count] * ROUNDS))
                seconds = time.perf_counter() - begin
            tokens = sum(map(len, answers))
            rows.append(
                {
                    "cuda_graphs": graphs,
                    "clients": count,
                    "tokens": tokens,
                    "seconds": round(seconds, 3),
                    "tokens_per_second": round(tokens / seconds, 1),
                    "tokens_as_generate": same_until,
                }
            )
    return rows


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--clients", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--layers", type=int, help="instead of those of the model")
    parser.add_argument("--tiny", action="store_true", help="a small model, on any machine")
    parser.add_argument("--json", type=Path, default=Path("eval/results/serve-h200.json"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
