"""Tracking of attention weights, for attention that is written by hand.

=======================  ================================================================================
``softmax_candidates``   a softmax that may be attention, and the products with values that show it
``axes``                 identities for the axes of the weights, which persist through views and copies
``tracked_weights``      a tensor that holds weights, with the axes of each of its dimensions
``weight_tracker``       the dispatch mode that follows the weights from the softmax to these products
``softmax_analysis``     whether a softmax is an attention, which axes are heads and queries, what is shown
=======================  ================================================================================
"""
