"""Pieces of kernels of several operators, without Triton's float8 types (docs/kernels.md).

Those for 4-bit codes come first, those for E4M3 codes last.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core.formats import E4M3, FP8_E4M3, WHOLE, Format

# Whether kernels are compiled. The interpreter runs no inline assembly.
PTX = tl.constexpr(not triton.knobs.runtime.interpret)

# The dtypes that kernels read, as Triton calls them; float64 is rounded to float32 first.
DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}

# Options of every launch: a sum is fused into a multiplication only where tl.fma says so.
LAUNCH = {"enable_fp_fusion": False}

_E4M3 = tl.constexpr(E4M3)

# Up to this multiple of the largest element the search near naive scales clips no quotient: so far
# below `halving_reach`, 7 / 6 of it for E2M1, that rounding to bfloat16 does not reach that.
UNCLIPPED = tl.constexpr(1.15)


def supports(fmt: Format) -> bool:
    """Return whether the kernels know a format. They ask for its properties alone."""
    # Codes are nibbles: a sign above the index of a magnitude, and the magnitudes are those of a
    # binary float. Blocks have 16 or 32 of them. Scales are powers of two or do not use the sign
    # bit of their byte. The search near naive scales takes quotients up to `UNCLIPPED` times the
    # largest element as they are, and blocks below 2^-3 round to zero at a scale of 1.
    element, scale = fmt.element, fmt.scale
    nibbles = element.bits == 4 and element.minifloat is not None and element.minifloat[1] <= 1
    unclipped = element.halving_reach >= element.max * UNCLIPPED.value * (1 + 2.0**-7)
    if scale.mantissa_bits == 0:
        bytes_known = not scale.subnormal and scale.bias == 127
    else:
        bytes_known = scale.subnormal and scale.last < 128
    searched = unclipped and element.dead_zone >= 2.0**-3
    return nibbles and searched and bytes_known and fmt.block in (16, 32)


@lru_cache(maxsize=64)
def capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of a GPU, or zeros."""
    if device.type == "cpu":
        return 0, 0
    properties = torch.cuda.get_device_properties(device)
    return properties.major, properties.minor


@lru_cache(maxsize=64)
def launch(device: torch.device, releases: bool = False) -> dict[str, bool]:
    """Return `LAUNCH`, for a kernel that begins with `wait`, maybe before its turn."""
    # From sm_90 on a kernel can be launched while the one before it runs.
    if capability(device)[0] < 9:
        return {**LAUNCH, "OVERLAP": False, "RELEASES": False}
    return {**LAUNCH, "OVERLAP": True, "RELEASES": releases, "launch_pdl": True}


@triton.jit
def asm(CODE: tl.constexpr, CONSTRAINTS: tl.constexpr, given, DTYPE: tl.constexpr = tl.int32):
    """Return what PTX without side effects makes of each element of some tensors."""
    return tl.inline_asm_elementwise(CODE, CONSTRAINTS, given, DTYPE.value, True, 1)


@triton.jit
def wait(OVERLAP: tl.constexpr, RELEASES: tl.constexpr):
    """Wait until the kernel before this one has ended, if this one was launched early."""
    # RELEASES: the next kernel may be launched as soon as all programs of this one have waited.
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    if RELEASES:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def clear(zeros, count):
    """Set int32 zeros [count], if there are any, to 0: all programs of axis 0 together."""
    if zeros is not None:
        for start in range(tl.program_id(0) * 32, count, tl.num_programs(0) * 32):
            at = start + tl.arange(0, 32)
            tl.store(zeros + at, tl.zeros((32,), tl.int32), mask=at < count)


def cdiv(a: int, b: int) -> int:
    """Return a / b rounded up. triton.cdiv takes the host as long as a small operator of torch."""
    return -(-a // b)


def as_words(x: Tensor) -> Tensor:
    """Return the memory of x, copied if need be, as int64 words [W]; zeros end the last one."""
    # Four 16-bit floats are a word, or two float32; float64 is rounded to float32 first.
    x = (x.float() if x.dtype == torch.float64 else x).reshape(-1)
    if rest := x.numel() % (8 // x.element_size()):
        x = torch.nn.functional.pad(x, (0, 8 // x.element_size() - rest))
    return wider(x, torch.int64)


def wider(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x [..., K] as words [..., W] of a wider dtype, copied if it must be."""
    x, size = x.contiguous(), dtype.itemsize
    # A view must start at a whole word of the storage, which itself may start anywhere.
    if x.data_ptr() % size or x.storage_offset() * x.element_size() % size:
        x = x.clone()
    return x.view(dtype)


@triton.jit
def chosen(values, starts, program):
    """Return the value for the tensor whose programs, from its start on, this is one of."""
    value = values[0]
    for i in tl.static_range(1, len(values)):
        value = tl.where(program >= starts[i], values[i], value)
    return value


@triton.constexpr_function
def power(exponent):
    """Return 2^exponent as a float."""
    return math.ldexp(1.0, exponent)


@triton.jit
def global_multiplier(stored, FMT: tl.constexpr):
    """Return the scalar that multiplies, for a pointer to a stored global scale."""
    value = tl.load(stored)
    if not FMT.multiplies:
        value = tl.math.div_rn(1.0, value)
    return value


@triton.constexpr_function
def shift(ELEMENT):
    """Return how far the bits of a magnitude's code are from their place in a float32."""
    return 23 - ELEMENT.minifloat[0]


@triton.constexpr_function
def min_exponent(ELEMENT):
    """Return the exponent of an element's smallest normal magnitude."""
    return ELEMENT.minifloat[1]


@triton.jit
def bits_of(x):
    """Return the bits of float32 x, int32."""
    return x.to(tl.int32, bitcast=True)


@triton.jit
def float_of(bits):
    """Return the float32 of int32 bits."""
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def scale_value(byte, SCALE: tl.constexpr):
    """Return the float32 value of scale bytes (any integer dtype) that are numbers."""
    bits = byte.to(tl.int32) << (23 - SCALE.mantissa_bits)
    if SCALE.subnormal:
        # A float32 subnormal or small normal with the same fields; bring the bias into line.
        value = float_of(bits) * power(127 - SCALE.bias)
    else:
        # Byte 0 is 2^-bias, which only foreign checkpoints hold.
        tl.static_assert(SCALE.mantissa_bits == 0 and SCALE.bias == 127)
        value = float_of(tl.maximum(bits, 1 << 22))
    return value


@triton.jit
def decode_scale(byte, SCALE: tl.constexpr):
    """Return the float32 value of any scale byte up to SCALE.nan, which is NaN."""
    return tl.where(byte.to(tl.int32) == SCALE.nan, float("nan"), scale_value(byte, SCALE))


@triton.jit
def round_to_scale(value, SCALE: tl.constexpr):
    """Return the byte (int32) nearest to float32 values >= 0, ties to even; 0 for zero."""
    drop: tl.constexpr = 23 - SCALE.mantissa_bits
    bits = bits_of(value)
    # The fields of the float, rounded to the mantissa, and its exponent counted from the bias.
    even = (bits >> drop) & 1
    normal = ((bits + ((1 << (drop - 1)) - 1) + even) >> drop) - (
        (127 - SCALE.bias) << SCALE.mantissa_bits
    )
    if SCALE.subnormal:
        # Adding 2^23 rounds to an integer: the multiple of the smallest subnormal.
        steps = value * power(SCALE.bias - 1 + SCALE.mantissa_bits) + power(23)
        normal = tl.where(value < power(1 - SCALE.bias), bits_of(steps) - 0x4B000000, normal)
    return tl.minimum(normal, SCALE.last)


@triton.jit
def naive_byte(amax, global_scale, FMT: tl.constexpr):
    """Return the scale byte (int32), at least 1, that finite float32 amax suggests."""
    SCALE: tl.constexpr = FMT.scale
    ELEMENT: tl.constexpr = FMT.element
    if SCALE.mantissa_bits > 0:
        byte = round_to_scale(tl.math.div_rn(amax, global_scale * ELEMENT.max), SCALE)
    else:
        byte = (bits_of(amax) >> 23) - 127 - octaves(ELEMENT) + SCALE.bias
    return tl.minimum(tl.maximum(byte, 1), SCALE.last)


@triton.constexpr_function
def octaves(NUMBERS):
    """Return floor(log2) of the largest magnitude of an Element or a Scale."""
    return math.frexp(NUMBERS.max)[1] - 1


@triton.jit
def round_to_codes(y, ELEMENT: tl.constexpr):
    """Return the codes (int32, no sign) of finite float32 quotients |y|, ties to the even code."""
    # In the binade of y the elements are multiples of a power of two. Adding 1.5 * 2^23 of it
    # rounds to them, and the difference of the bits counts them (as in rounding.py).
    y = tl.minimum(tl.abs(y), ELEMENT.max)
    binade = tl.maximum(bits_of(y) & 0x7F800000, (min_exponent(ELEMENT) + 127) << 23)
    anchor = binade + ((shift(ELEMENT) << 23) | 0x400000)
    index = bits_of(y + float_of(anchor)) - anchor
    field = (binade >> 23) - (min_exponent(ELEMENT) + 127)
    return index + (field << (23 - shift(ELEMENT)))


@triton.jit
def code_value(code, ELEMENT: tl.constexpr):
    """Return the float32 value of codes (int32) without their sign."""
    return float_of(code << shift(ELEMENT)) * power(126 + min_exponent(ELEMENT))


@triton.jit
def reciprocal(x):
    """Return 1 / x of normal float32 x, to 2^-23."""
    if PTX:
        inverse = asm("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32)
    else:
        inverse = 1.0 / x
    return inverse


@triton.jit
def corrected_quotient(x, step, inverse):
    """Return x / step as IEEE division rounds it, of normal numbers; inverse: 1 / step, rounded."""
    # Markstein, Computation of elementary functions on the IBM RS/6000, theorem 5.
    quotient = x * inverse
    return tl.fma(tl.fma(-quotient, step, x), inverse, quotient)


@triton.jit
def exact_quotient(x, step):
    """Return x / step as IEEE division rounds it, for normal steps."""
    # Times a power of two where they are small, so that what is left of x stays normal.
    by = tl.where(step < 2.0**-60, 2.0**60, 1.0)
    step *= by
    return corrected_quotient(x * by, step, tl.math.div_rn(1.0, step))


@triton.jit
def e4m3_bits(x):
    """Return float32 x, at most 448 in size or NaN, rounded to E4M3: its bits, uint8."""
    if PTX:
        bits = x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        # The interpreter's own conversion rounds ties away.
        magnitude = round_to_scale(tl.abs(x), _E4M3.value)
        bits = tl.where(x == x, magnitude | ((bits_of(x) >> 24) & 0x80), 0x7F).to(tl.uint8)
    return bits


@triton.jit
def load(pointers, inside, WHOLE: tl.constexpr):
    """Load, and return 0 where not `inside`; WHOLE: all are."""
    if WHOLE:
        value = tl.load(pointers)
    else:
        # Triton casts no integer to a float8.
        ZERO: tl.constexpr = 0.0 if pointers.dtype.element_ty.is_fp8() else 0
        value = tl.load(pointers, mask=inside, other=ZERO)
    return value


@triton.jit
def load_block(words, block, mask, COUNT: tl.constexpr):
    """Return the int64 words of one block per lane, a tuple of COUNT tensors like `block`."""
    loaded = ()
    for i in tl.static_range(COUNT):
        loaded = loaded + (tl.load(words + block * COUNT + i, mask=mask, other=0),)
    return loaded


@triton.jit
def unpack_word(word, DTYPE: tl.constexpr):
    """Return the float32 values in an int64 word of four 16-bit floats or two float32, a tuple."""
    low = word.to(tl.int32)
    high = (word >> 32).to(tl.int32)
    if DTYPE == tl.float32:
        values = (float_of(low), float_of(high))
    else:
        values = unpack_half(low, DTYPE) + unpack_half(high, DTYPE)
    return values


@triton.jit
def unpack_half(pair, DTYPE: tl.constexpr):
    """Return the float32 values of two 16-bit floats in an int32."""
    if DTYPE == tl.bfloat16:
        first = float_of(pair << 16)
        second = float_of(pair & -65536)
    else:
        first = pair.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        second = (pair >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return first, second


@triton.jit
def pack_half(a, b, DTYPE: tl.constexpr):
    """Return two float32, rounded to 16-bit floats, in an int32."""
    if DTYPE == tl.float16:
        low = a.to(tl.float16).to(tl.uint16, bitcast=True).to(tl.int32)
        pair = low | (b.to(tl.float16).to(tl.uint16, bitcast=True).to(tl.int32) << 16)
    elif PTX:
        pair = asm("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [a, b])
    else:
        # The interpreter's own conversion truncates.
        low, high = bits_of(a), bits_of(b)
        low = (low + 0x7FFF + ((low >> 16) & 1)) >> 16
        high = (high + 0x7FFF + ((high >> 16) & 1)) & -65536
        pair = (low & 0xFFFF) | high
    return pair


@triton.jit
def unpack_block(words, DTYPE: tl.constexpr):
    """Return the float32 values of a block's words, a tuple."""
    values = ()
    for i in tl.static_range(len(words)):
        values = values + unpack_word(words[i], DTYPE)
    return values


@triton.jit
def tree_max(values):
    """Return the elementwise maximum of a tuple of tensors, 2^k of them up to 32."""
    for _ in tl.static_range(5):
        if len(values) > 1:
            level = ()
            for i in tl.static_range(len(values) // 2):
                level = level + (tl.maximum(values[i], values[len(values) // 2 + i]),)
            values = level
    return values[0]


@triton.jit
def rounded(x, DTYPE: tl.constexpr):
    """Return float32 x rounded to a dtype, ties to even. The interpreter truncates to bfloat16."""
    if PTX or DTYPE != tl.bfloat16:
        y = x.to(DTYPE)
    else:
        bits = bits_of(x)
        bits = tl.where(x == x, bits + 0x7FFF + ((bits >> 16) & 1), 0x7FC00000)
        y = (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return y


# The smallest scale (`float_scales.SMALLEST`).
_SMALLEST = tl.constexpr(2.0**-126)

# The fields of a code at their places in a float32: its sign, and the low ones of its exponent.
_FIELDS = tl.constexpr(0x87F00000 - (1 << 32))


def supports_any(fmt: Format) -> bool:
    """Return whether the kernels for 4-bit codes, or those for E4M3 ones, know a format."""
    if fmt.element != FP8_E4M3:
        return supports(fmt)
    # Scales are float32 numbers of rows, of tiles of 128 or of all, or powers of two of 32 or 16.
    if fmt.has_float_scale:
        return (fmt.rows, fmt.block) in ((1, WHOLE), (WHOLE, WHOLE), (128, 128))
    powers = fmt.scale.mantissa_bits == 0 and fmt.scale.bias == 127 and not fmt.scale.subnormal
    return powers and fmt.rows == 1 and fmt.block in (16, 32)


@triton.jit
def value_at(word, i):
    """Return the float32 value of the i-th code in int32 words of four."""
    # Its low bits are those of a float32 whose bias is 120 less, subnormal ones included.
    if i < 3:
        word = word << (24 - 8 * i)
    return float_of((word >> 4) & _FIELDS) * power(120)


@triton.jit
def value_of(code):
    """Return the float32 value of codes in uint8."""
    return value_at(code.to(tl.int32), 0)


@triton.jit
def scale_of_amax(amax_bits, FMT: tl.constexpr):
    """Return stored scales and factors of codes for the int32 bits of amax; NaN if not finite."""
    finite = amax_bits < 0x7F800000
    amax = float_of(tl.where(finite, amax_bits, 0))
    if FMT.has_float_scale:
        step = tl.maximum(tl.math.div_rn(amax, FMT.element.max), _SMALLEST)
        step = tl.where(finite, step, float("nan"))
        stored = step
    else:
        carried = (bits_of(amax) + FMT.element.carry) >> 23
        byte = tl.minimum(tl.maximum(carried - octaves(FMT.element), 1), FMT.scale.last)
        step = tl.where(finite, float_of(byte << 23), float("nan"))
        stored = tl.where(finite, byte, FMT.scale.nan).to(tl.uint8)
    return stored, step


@triton.jit
def codes_of(x, step, ELEMENT: tl.constexpr):
    """Return the codes uint8 of float32 x at steps that broadcast to it; 0 where those are NaN."""
    known = step == step
    quotient = tl.math.div_rn(tl.where(known, x, 0.0), tl.where(known, step, 1.0))
    sign = tl.where(known, (bits_of(x) >> 24) & 0x80, 0)
    return (round_to_codes(quotient, ELEMENT) | sign).to(tl.uint8)


@triton.jit
def power_of_byte(byte):
    """Return the float32 value of E8M0 bytes: 2^(byte - 127), NaN for 255."""
    bits = byte.to(tl.int32) << 23
    value = float_of(tl.maximum(bits, 1 << 22))
    return tl.where(byte.to(tl.int32) == 255, float("nan"), value)
