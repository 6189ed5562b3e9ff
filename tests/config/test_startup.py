"""Settings load without torch, with few imports, and read nothing from disk but code."""

import json
import subprocess
import sys

PROGRAM = """
import json, sys
opened = []
sys.addaudithook(lambda event, arguments: event == "open" and opened.append(str(arguments[0])))
before = set(sys.modules)
import megalith.config
print(json.dumps([sorted(set(sys.modules) - before), [path for path in opened if path.endswith(".yaml")]]))
"""
# packages that settings use, and their own imports
PACKAGES = {"pydantic", "pydantic_core", "annotated_types", "typing_extensions", "typing_inspection", "yaml"}


def test_settings_import_pydantic_and_yaml_alone_and_read_no_recipe():
    out = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True).stdout
    modules, recipes = json.loads(out)
    ours = {name for name in modules if name.partition(".")[0] == "megalith"}
    assert {".".join(name.split(".")[:2]) for name in ours} == {
        "megalith",
        "megalith.config",
        "megalith.errors",
        "megalith.input_file",
        "megalith.recipe_files",
    }
    others = {name.partition(".")[0] for name in modules} - sys.stdlib_module_names - {"megalith"}
    # names with an underscore are compiled parts of these packages and of Python
    assert {name for name in others if not name.startswith("_")} - PACKAGES <= {"cython_runtime"}
    assert recipes == []
