"""A server with OpenAI's protocol over an engine of continuous batching, which needs the extra ``serve``."""

from ..errors import BackendUnavailableError
from ..extras import pip_install

try:
    import starlette as starlette
    import uvicorn as uvicorn
except ModuleNotFoundError:
    raise BackendUnavailableError(f"the server needs starlette and uvicorn: {pip_install('serve')}") from None
