"""From files to batches.

sources   what a recipe names → examples, one after the other       (formats, files: how they are read)
text      sentences → token ids and back     (vocabulary: how it is learned; moses: Multi30k's own tokens)
store     examples → token ids on disk, larger than memory if need be
batches   token ids → batches by token count, in an order that seed and epoch decide
labelled  texts with labels, from columns of tables;  tagged: words with tags;  questions: with answers
examples  texts as token ids with such marks → batches  (windows: over long ones;  held_out: set aside)
links     gold word alignments;  vectors: pretrained word vectors;  fetch: public data sets
sound     waveforms and spectra;  spoken: text in symbols;  voices: built-in speech  (formants: its sounds)
recordings with what is said in them → frames: their spectra, on disk → utterances: as batches
members   files in a folder or a .tar;  kept: what was made of them, on disk
"""
