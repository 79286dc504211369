"""C++ for CPUs, compiled once by the compiler of torch.compile, and kept in its cache.

few_rows.h multiplies a few rows by a packed weight, decoded in registers; kernels.cpp has that for
eager calls, and turns codes into values and back. All give the bits of the references, except for
the order of sums. Without a compiler the references run.
"""
