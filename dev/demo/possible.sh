#!/bin/sh
# Says at once what `make demo` lacks, before minutes are spent on installing; dev/cluster/host.py has the last word.
if [ "$(uname)" = Linux ] && [ "$(id -u)" = 0 ]; then exit 0; fi
echo "error: make demo needs root on Linux (\`sudo make demo\`); docs/kind.md is for Docker and kind." >&2
exit 2
