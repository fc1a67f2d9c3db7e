"""Model families: one declarative table each, both directions between Hugging Face and Megatron names."""
