#!/bin/sh
# Says at once what `make demo` lacks, before minutes are spent on installing; dev/demo/backend.py has the last word.
if [ "$(uname)" = Linux ] && [ "$(id -u)" = 0 ]; then exit 0; fi
if command -v kind >/dev/null && docker info >/dev/null 2>&1; then exit 0; fi
echo "error: make demo needs root on Linux (\`sudo make demo\`), or a Docker engine that answers and \`kind\` on the PATH." >&2
exit 2
