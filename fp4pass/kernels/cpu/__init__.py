"""C++ for CPUs, compiled once by the compiler that torch.compile uses, and kept in its cache.

few_rows.h multiplies a few rows and a packed weight that it decodes in registers; dequantize.h
makes numbers of codes. kernels.cpp has both for eager calls, and the conversion of numbers to
codes, all with the bits of the references but for the order of sums. library.py loads them.
Without a compiler the references serve.
"""
