"""Kernels that nothing serves yet. They are tested and compiled like the others; each waits for a measurement on a GPU.

| kernel                            | would replace in a decode layer              | waits for                         |
|-----------------------------------|----------------------------------------------|-----------------------------------|
| `write_latents.write_new_latents` | XLA's RMSNorm and RoPE and `mla.write_pages` | `benchmarks/gpu/mla.py`, "norm,   |
|                                   |                                              | rotate and write the cache"       |

A kernel leaves this folder when the measurement shows that it wins, and is removed when it does not.
"""
