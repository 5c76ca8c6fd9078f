# %% [markdown]
# # Beyond one machine
#
# $\sqrt{d}$ and $$\mathrm{softmax}\left(\frac{QK^\top}{\sqrt{d}}\right)V$$
# %%
print(1)
