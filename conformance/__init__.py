"""Tests of any attention: properties, their cases, and the error budget of each result.

    properties/             what an attention must do, by kind; PROPERTIES is the table
    verification.py         backends held to the properties, as the table that both commands print
    backend_under_test.py   the attention under test, and the cases that it takes
    cases.py                random and adversarial inputs; the budget, relative to naive's own error
    adversarial.py          how inputs differ from normal numbers
    other_functions.py      the same for an attention that is not softmax
    caches.py               sequences in a cache of fixed shape, in one piece or in pages
    views.py                memory layouts
    memory_growth.py        how the largest tensor and the saved bytes grow with the length
    errors.py               an exception in one line, with its cause
    outside/                attn-conform: the same for functions that do not know this project

The package imports only `attention`, and nothing in `attention` imports it.
packaging/attn-conform makes a distribution of the two.
"""
