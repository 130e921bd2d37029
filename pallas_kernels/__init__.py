"""Kernels by operation: each folder defines one operation and implements it once per platform, with one signature.

| folder | operation | CPU | TPU | Hopper |
| --- | --- | --- | --- | --- |
| paged_attention | ragged attention over a paged KV pool | XLA | kernel | kernel |
| kv_write | new K and V into their slots of the pool | XLA | in the kernel above | XLA |
| block_copy | whole blocks onto blocks, to and from the host | XLA | kernel | XLA |
| matmul | products of few tokens | XLA | XLA | kernel, where measured to be faster |
| quant_matmul | products with weights in int8, int4, fp8 | XLA | kernel | kernel |
| grouped_matmul | rows with the weights of their experts | XLA | kernel | kernel |
| lora | low-rank adapters, a different one for each row | XLA | kernel | kernel |
| rope | rotary embeddings of queries and keys | XLA | kernel | XLA |
| embedding | rows of tokens in a table that lies by column | XLA | kernel | XLA |
| token_mask | which tokens a row may sample, and biases | XLA | kernel | XLA |

Each also has a reference, which is its definition.

This package imports jax and nothing from jaxpage: it provides mechanisms and makes no choices.
"""
