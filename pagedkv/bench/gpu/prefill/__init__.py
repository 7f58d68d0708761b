"""prefill_attention on a GPU, beside other libraries."""
