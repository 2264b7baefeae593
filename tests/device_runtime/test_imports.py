import subprocess
import sys

MODULES = "session", "runner", "transport", "cache", "identity", "examples", "backends.onnxruntime"
FOREIGN = "torch", "fastapi", "sqlalchemy", "pydantic", "onnx", "sklearn", "coordinator", "export", "simulator"


def test_a_device_loads_no_tensor_library_and_no_server():
    code = "import sys\n" + "".join(f"import device_runtime.{name}\n" for name in MODULES)
    code += f"print([name for name in {FOREIGN} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
    assert done.stderr == ""
