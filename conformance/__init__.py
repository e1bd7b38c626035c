"""Tests of any attention: properties, their cases, and the error budget of each result.

    command.py              attn-conform run my_package:attend dialect=fa
    dialects.py             how to call an attention, as data
    probe.py                finds the dialect by calling the attention
    minimise.py             finds the smallest failing call of a red property
    script_of_call.py       writes it as a script
    pytest_plugin.py        pytest --attention my_package:attend --dialect fa
    properties.py           what an attention must do; PROPERTIES is the table
    cases.py                random and adversarial inputs; the budget, relative to naive's own error
    backend_under_test.py   the attention under test, and the cases that it takes
    errors.py               an exception in one line, with its cause
    mask_tensors.py         masks in each form and layout that a dialect takes
    memory_growth.py        how the largest tensor and the saved bytes grow with the length

The package imports only `attention`, and nothing in `attention` imports it.
packaging/attn-conform makes a distribution of the two.
"""
