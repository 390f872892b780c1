"""The mathematics of two gradients; imports torch alone.

A step goes through `pair` (both backward passes), `gram_meter` (three numbers per block), `methods`
(weights from the `gram`) and `combine` (g* into `.grad`); `guard` checks what the optimizer made of
it.
"""
