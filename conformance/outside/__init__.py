"""attn-conform: the properties for anybody's function.

command.py         attn-conform run my_package:attend dialect=fa
dialect.py         how to call an attention, as data
dialects.py        the dialects by name, and the attention that a user names
adapter.py         a function in its dialect, as a Backend
properties.py      its properties: those of conformance, and masks as tensors
probe.py           finds the dialect by calling the attention
minimise.py        finds the smallest failing call of a red property
script.py          writes it as a script
fuzz.py            random calls
pytest_plugin.py   pytest --attention my_package:attend --dialect fa
"""
