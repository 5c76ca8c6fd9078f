"""From files to batches.

readers/        files and data sets → examples
tokenizers/     text → token ids or symbols, and back
caches/         token ids, image features and spectrograms on disk
batching/       examples → batches of similar length, in an order that depends on seed and epoch
builtin/        generated data sets: captioned scenes, spoken numbers, documents, English–Korean sentences
audio, images   decoding of files
image_inputs    cached features or augmented pixels of a batch
splits          held-out validation and test examples
download        public data sets
"""
