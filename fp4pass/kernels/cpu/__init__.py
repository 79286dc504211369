"""C++ for CPUs, compiled once by the compiler of torch.compile, and kept in its cache.

weights.h multiplies a few rows by a packed weight, decoded in registers, and turns codes into
values; kernels.cpp has that for eager calls, and turns values into codes. All give the bits of the
references, except for the order of sums. Without a compiler the references run.
"""
