"""mlxd for Python programs: `mlxd.client` is the typed client, `mlxd.v1` the generated messages.

Importing this package imports neither of them.
"""

from importlib.metadata import version

__version__ = version("mlxd")
