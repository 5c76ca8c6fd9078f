"""How good outputs are: translations, differences between systems, word alignments."""
