"""Train a small mixture of experts on the texts of `train_tiny_lm.py`.

    python examples/train_tiny_moe.py --corpus build/tiny_lm_corpus.json --out build/tiny_moe

A Qwen3-MoE: 8 layers, 16 experts of which a token takes 2, with the loss that balances their load.
The texts, the tokenizer and the training loop are those of the small language model. Its weights
are too large to keep in the repository. A try on a CPU:

    python examples/train_tiny_moe.py --steps 3 --batch 2 --num-hidden-layers 2 --out build/tiny_moe
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from small_lm import CONTEXT, Training, make, measure, parse_args, recipe_of, write_report
from torch import Tensor, nn
from torch.func import functional_call
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer


@dataclass(frozen=True)
class Recipe(Training):
    """Shape of the mixture and how it is trained; every field is a flag.

    `balance` is the weight of the load-balancing loss.
    """

    hidden_size: int = 256
    moe_intermediate_size: int = 256
    num_experts: int = 16
    num_experts_per_tok: int = 2
    num_hidden_layers: int = 8
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    balance: float = 0.01


def build_model(recipe: Recipe) -> nn.Module:
    """Build a Qwen3-MoE with fresh weights."""
    config = AutoConfig.for_model(
        "qwen3_moe",
        vocab_size=recipe.vocab_size,
        hidden_size=recipe.hidden_size,
        moe_intermediate_size=recipe.moe_intermediate_size,
        num_experts=recipe.num_experts,
        num_experts_per_tok=recipe.num_experts_per_tok,
        norm_topk_prob=True,
        num_hidden_layers=recipe.num_hidden_layers,
        num_attention_heads=recipe.num_attention_heads,
        num_key_value_heads=recipe.num_key_value_heads,
        head_dim=recipe.head_dim,
        router_aux_loss_coef=recipe.balance,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    return AutoModelForCausalLM.from_config(config)


def balanced_loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy of all targets but the first; balance the load in training.

    inputs, targets: [n, CONTEXT].
    """
    # Products of all experts at once, on a GPU in bfloat16 alone, take no notice of autocast.
    experts = {n: p.bfloat16() for n, p in model.named_parameters() if p.ndim == 3 and p.is_cuda}
    output = functional_call(
        model,
        experts,
        kwargs={"input_ids": inputs, "use_cache": False, "output_router_logits": model.training},
    )
    logits = output.logits[:, :-1].flatten(0, 1).float()
    loss = nn.functional.cross_entropy(logits, targets[:, 1:].flatten())
    return loss + model.config.router_aux_loss_coef * output.aux_loss if model.training else loss


def main() -> None:
    args = parse_args(__doc__, Recipe, Path("build/tiny_moe"))
    recipe = recipe_of(args, Recipe)
    report, texts = make(args, recipe, lambda: build_model(recipe), balanced_loss, compiled=False)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(args.out).to(device)
    tokenizer = AutoTokenizer.from_pretrained(args.out)
    report["results"] = {part: measure(model, tokenizer, text) for part, text in texts.items()}
    write_report(args.out, report)


if __name__ == "__main__":
    main()
