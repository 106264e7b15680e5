#!/bin/sh
# Says at once what `make demo` lacks, before minutes are spent on installing; dev/demo/backend.py has the last word.
if [ "$CLUSTER" = kind ]; then
  for each in docker kind kubectl helm; do
    command -v "$each" >/dev/null || { echo "error: CLUSTER=kind needs $each on the PATH." >&2; exit 2; }
  done
  exit 0
fi
if [ "$(uname)" = Linux ] && [ "$(id -u)" = 0 ]; then exit 0; fi
echo "error: make demo needs root on Linux (\`sudo make demo\`). CLUSTER=kind make demo uses Docker and kind; nobody has run that yet." >&2
exit 2
