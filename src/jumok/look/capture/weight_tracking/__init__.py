"""Tracking of attention weights, for attention that is written by hand: a softmax and a product with values.

Such code has no arguments to read, so the tensors that hold the weights are tracked. In this example, values
are ``(B · H, K, D)``::

    weights = scores.softmax(-1)                       # (B, H, Q, K), axes b h q k: k is the key axis
    out = weights.reshape(B * H, Q, K) @ values        # dimensions (b h) q k

1. The wrapper of ``softmax`` (:mod:`..adapters.handwritten`) makes a candidate. Each dimension of its output
   gets an axis, and a dispatch mode, which sees every operation, is entered.
2. A view keeps the axes. Along which of them a dimension runs follows from its stride and its size: the first
   dimension of the reshaped weights has the stride of h and B · H elements, so it runs along b and h.
3. A copy keeps the axes, and so does dropout, beside which the weights before it are kept. Other operations
   give changed weights, with axes of their own in the same order, or weights that are lost, with the reason.
4. A product that sums over exactly the key axis is the one with the values. The axes that the values have too
   are batch axes (b h), the others are query axes (q). A product and a sum, elementwise, counts as well.
5. When the module ends, its candidates are analysed. An attention has scores that are a product of two
   tensors, or weights over positions; its batch axes are batch and heads. These are told apart by the number of
   heads that the module declares. If they share an axis, the batch is the outer part, unless the model divides the
   output of the product otherwise; the output is tracked until then. Ambiguous axes are reported, not guessed.
6. The scores are captured, or the weights, if these were changed after the softmax or the scores overwritten.

=======================  ================================================================================
``softmax_candidates``   a softmax that may be attention, and the products with values that show it
``axes``                 identities for the axes of the weights, which persist through views and copies
``tracked_weights``      a tensor that holds weights, with the axes of each of its dimensions
``weight_tracker``       the dispatch mode that tracks the weights from the softmax to these products
``softmax_analysis``     whether a softmax is an attention, which axes are heads and queries, what is shown
=======================  ================================================================================
"""
