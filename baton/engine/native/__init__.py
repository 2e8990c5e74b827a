"""The CPU backend in C++: ``decoder.NativeDecoder`` over the kernels in ``src``, compiled by ``build.build``.

From the outside in: ``model.cpp`` (C interface), ``forward.h`` (one step), ``moe.h``, ``attention.h`` over
``kv_tile.h``, ``gemm.h`` over ``panel.h`` (packed weights), ``rowwise.h``, ``element.h`` (float32 and bfloat16) and
``simd*.h`` (16 lanes on any x86-64). ``threads.h`` runs it all in lockstep stages, ``abi.h`` mirrors ``library.py``.
A library of its own, because fronts load it, too: ``kv_copy.cpp``, by way of ``block_copy.py``.
"""
