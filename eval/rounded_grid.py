"""Whether scales chosen for rounded weights pay: KL of compute="fp8" with and without.

    python eval/rounded_grid.py [--model DIR --calib FILE --text FILE] --json OUT

FP8 products round a packed nvfp4 weight to E4M3 once more (docs/kernels.md). Here scales and codes
are searched again as `sse` does, of the scales within eight of the one it chose, with the numbers
that are left after that rounding as the grid. Errors are |w - w'| / |w| over all linears.
"""

from __future__ import annotations

import copy
import json
from typing import Any

import torch
from measuring import command, machine
from quality import compared, make_parser, measure, opened
from torch import Tensor

import fp4pass
from fp4pass.core.formats import get_format
from fp4pass.core.packing import pack_codes
from fp4pass.kernels.common.rounding import global_multiplier, power_of_two, scale_values
from fp4pass.kernels.fp8.naive import shift_of
from fp4pass.linear import PackedBlocks

FORMAT = get_format("nvfp4")
NEAR, ROWS = 8, 64


def main() -> None:
    args = make_parser(__doc__).parse_args()
    args.text = args.text or [args.model / "eval.txt"]
    model, tokenizer = opened(args)
    originals = measure(model, None, tokenizer, args)
    converted = fp4pass.convert(copy.deepcopy(model), "nvfp4", "sse", weight_only=True)
    rows: dict[str, Any] = {}

    def note(name: str) -> None:
        found = measure(converted, model, tokenizer, args)
        rows[name] = {text: compared(here, originals[text], {}) for text, here in found.items()}
        print(name, {text: row["kl"] for text, row in rows[name].items()}, flush=True)

    note("input")
    fp4pass.set_compute(converted, "fp8")
    note("fp8")
    squares = torch.zeros(4, dtype=torch.float64)
    for name, module in converted.named_modules():
        if isinstance(module, PackedBlocks):
            squares += search_again(module, model.get_submodule(name).weight.detach())
    note("fp8, searched for it")
    weight, *errors = squares.sqrt().tolist()
    names = ("exact", "rounded", "rounded, searched for it")
    result = {
        "command": command(args.model),
        **machine("cpu"),
        "model": args.model.name,
        "rows": rows,
        "errors": {name: error / weight for name, error in zip(names, errors, strict=True)},
    }
    print(json.dumps(result["errors"]))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


def search_again(module: Any, weight: Tensor) -> Tensor:
    """Give a converted linear codes and scales for rounded products.

    Returns the squares of the weight, and of its errors: as it was, rounded, and searched again.
    """
    scale = module.weight_scale.view(torch.uint8)
    g = global_multiplier(module.weight_global_scale, FORMAT)
    parts = zip(weight.split(ROWS), scale.split(ROWS), strict=True)
    found = [_search(rows.float() / g, bytes_) for rows, bytes_ in parts]
    codes, scales, squares = zip(*found, strict=True)
    packed = pack_codes(torch.cat(codes))
    module.weight_packed = packed.view(module.weight_packed.dtype)
    module.weight_scale = torch.cat(scales).view(module.weight_scale.dtype)
    return torch.stack(squares).sum(0) * g.double().square()


def _search(rows: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    blocks = rows.view(len(rows), -1, FORMAT.block)
    magnitudes = torch.tensor(FORMAT.element.magnitudes)
    # The largest scale of a row stays, for all of it are rounded by its power of two.
    power, top = power_of_two(shift_of(scale, FORMAT))[:, None, None], scale.amax(1, keepdim=True)

    def squares(byte: Tensor, is_rounded: bool) -> Tensor:
        """Return the squared distance to each magnitude, [R, J, block, 8]."""
        values = magnitudes * scale_values(byte.to(torch.uint8), FORMAT.scale)[..., None]
        if is_rounded:
            values = (values * power).to(torch.float8_e4m3fn).float() / power
        return (blocks.abs()[..., None] - values[:, :, None]).square_()

    exact = squares(scale, False)
    code = exact.argmin(-1, keepdim=True)
    plain = squares(scale, True).gather(-1, code)
    best = torch.full(scale.shape, torch.inf)
    for step in sorted(range(-NEAR, NEAR + 1), key=abs):
        byte = torch.minimum((scale.int() + step).clamp(min=1), top.int())
        error, nearest = squares(byte, True).min(-1)
        total = error.sum(-1)
        if not step:
            codes, chosen = nearest, byte
        better = total < best
        best = torch.where(better, total, best)
        codes = torch.where(better[..., None], nearest, codes)
        chosen = torch.where(better, byte, chosen)
    codes |= ((blocks < 0) & (codes > 0)).long() * 8
    sums = (blocks.square(), exact.gather(-1, code), plain, best)
    return (
        codes.view_as(rows).to(torch.uint8),
        chosen.to(torch.uint8),
        torch.stack([each.double().sum() for each in sums]),
    )


if __name__ == "__main__":
    main()
