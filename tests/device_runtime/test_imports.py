import subprocess
import sys

MODULES = (
    "session",
    "runner",
    "protocol.transport",
    "state.cache",
    "state.folder",
    "examples",
    "device",
    "permission.guard",
    "permission.policy",
    "backends.onnxruntime",
)
FOREIGN = "torch", "httpx2", "fastapi", "sqlalchemy", "pydantic", "onnx", "coordinator", "export", "simulator"


HEAVY = "numpy", "msgspec", "onnxruntime", "cryptography", "sqlite3"


def test_the_package_alone_loads_nothing_and_then_what_is_asked_for():
    code = f"""
import sys, device_runtime
loaded = lambda: [name for name in {HEAVY} if name in sys.modules]
print(loaded())
for name in device_runtime.__all__:
    assert getattr(device_runtime, name).__name__ == name
print(loaded())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    # The runtime comes with the first session.
    assert done.stdout.splitlines() == ["[]", "['numpy', 'msgspec', 'cryptography', 'sqlite3']"]


def test_a_device_loads_no_tensor_library_and_no_server():
    code = "import sys\n" + "".join(f"import device_runtime.{name}\n" for name in MODULES)
    code += f"print([name for name in {FOREIGN} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
    assert done.stderr == ""
