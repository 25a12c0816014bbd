"""SGLang's HiCache on a CPU: what replaces the parts of it that need a GPU.

Loaded inside SGLang through its own plugin extension points, and only where KVWITNESS_STAND=1. No SGLang
file is changed. On the stand, device memory is host memory and every copy is synchronous: what it shows
about bookkeeping (what is cached where, what was loaded back, what was recomputed) is SGLang's own
behaviour; what it shows about speed, streams and pinned memory is not.
"""
