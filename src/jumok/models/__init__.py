"""The models, one system per file with its config. They import only attention and batches."""
