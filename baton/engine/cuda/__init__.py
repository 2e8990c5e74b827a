"""The GPU backend: FlashInfer attention, cuBLASLt and own kernels (``src``) under captured CUDA graphs.

``build`` compiles ``src`` into one shared library, ``library`` loads it, and each module declares the functions of its
own source file. Nothing outside this package imports it except ``baton.engine.load``, and every module can be imported
on a machine without a GPU.
"""
