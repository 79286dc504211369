"""C++ for CPUs, compiled once by the compiler of torch.compile, and kept in its cache.

few_rows.h multiplies a few rows by a packed weight, decoded in registers. dequantize.h turns codes
into values. kernels.cpp has both for eager calls, and turns values into codes. All give the bits of
the references, except for the order of sums. library.py loads them. Without a compiler the
references run.
"""
