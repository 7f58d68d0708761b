"""Drop-in calls: functions of other libraries, by their names and with their signatures, computed by pagedkv.

A script changes one import, or adds one call of ``register()``, and otherwise stays as it is. Whoever uses a module
imports it; nothing else in pagedkv does. docs/howto/coming-from.md lists how each call differs from its original.
"""

from importlib import import_module

from ..extras import pip_install

try:
    import_module("torch")
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"pagedkv.compat takes tensors of torch, which cannot be imported ({error}): {pip_install('torch')}",
        name=error.name,
    ) from error
