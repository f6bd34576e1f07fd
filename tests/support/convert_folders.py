"""Convert folders to GGUF files by llama.cpp's own converter: ``python convert_folders.py FOLDER...`` where it is.

``FOLDER/converted.gguf`` is written; the last line of the output holds the error by folder, "" where there is none.
"""

import json
import sys
from pathlib import Path

from engine_worker import converted

if __name__ == "__main__":
    errors = {}
    for folder in sys.argv[1:]:
        try:
            converted(Path(folder))
            errors[folder] = ""
        except Exception as error:  # the converter may raise anything; its message is the result
            errors[folder] = f"{type(error).__name__}: {error}"
    print(json.dumps(errors))
