"""C++ for CPUs, compiled once by the compiler that torch.compile uses, and kept in its cache.

few_rows.h multiplies a few rows and a packed weight that it decodes in registers; kernels.cpp has
that for eager calls, with the conversions of numbers to packed codes and back, whose results have
the bits of the references. library.py loads them. Without a compiler the references serve.
"""
