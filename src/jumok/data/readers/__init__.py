"""Readers: from files and data sets to examples, one module per kind of data set.

``tables`` reads the rows of .tsv, .csv, .jsonl and .parquet files and of the Hugging Face hub, ``archive`` the files of
folders and archives, and ``dataset_files`` finds what a recipe names. The other modules make examples of these.
:mod:`jumok.data.batching` makes batches of examples.
"""
