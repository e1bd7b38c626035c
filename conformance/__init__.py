"""What judges an attention: properties, the cases they try, and the budget a result must keep.

    command.py              attn-conform run my_package:attend dialect=fa
    dialects.py             how anybody's attention is called, as data
    probe.py                finds that out by calling it
    minimise.py             the smallest failing call, as a script
    exchange.py             judges by files what runs elsewhere
    pytest_plugin.py        pytest --attention my_package:attend --dialect fa
    properties.py           what an attention must do, one check a property; PROPERTIES is the table
    cases.py                random and adversarial inputs; the budget, relative to naive's own error
    backend_under_test.py   the attention that is judged, and the cases that it takes
    memory_growth.py        the largest tensor, and what is saved for backward, against the length
    numpy_reference.py      attention in float64 NumPy, written without a line of torch

It judges anybody's attention. It imports attention alone, and nothing in attention imports it.
packaging/attn-conform makes a distribution of the two.
"""
