"""Looking at attention: capture, what is computed from captures, figures, and the viewer.

::

    model ─ adapters ─> CapturedAttention ─> CapturedLayer ─> statistics, rollout
                        queries, keys, mask  name, tokens  ─> ViewerData ─> figures
                                                                         ─> tiles ─> views in the browser

- A captured layer (``capture/captures.py``) has a name, a kind, tokens, and a ``CaptureSource``, which returns its
  ``CapturedAttention``: of one call, of several, or of the steps of a generation.
- All numbers come from ``CapturedAttention.compute_weights``, for any part of a map. What needs a whole map
  iterates over it with ``views/row_chunks.py``; only the GPU kernel for pooled maps does not.
- ``ViewerData`` (``viewer/viewer_data.py``) is all that the viewer knows: layers, each with its shape, heads, labels
  and a ``WeightSource``, and media such as an image, whose positions are the queries or keys of a layer.

=====================================  =======================================================================
To add                                 touch
=====================================  =======================================================================
an adapter for a kernel                a file in ``capture/adapters/`` and its ``ADAPTERS``; it describes how
a number computed from captures        ``views/statistics.py``, and a method of ``CapturedLayer``
a figure                               a ``Drawing`` in ``figures/``, and ``viewer/view_writer.py``, which selects it
a view                                 a file in ``viewer/static/`` and ``views.js``; ``view.js`` describes how
another kind of axis, as of patches    ``viewer/medium.py``, ``MEDIA`` in ``viewer_data.py``, and its view
a layout of image tokens               ``huggingface/image_layout.py``
=====================================  =======================================================================
"""
