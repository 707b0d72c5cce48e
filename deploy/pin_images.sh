#!/bin/sh
# Appends to the tags of third-party images in .env the digests that their registries have now.
#
#   deploy/pin_images.sh [FILE]
#
# Needs docker. An image whose registry does not answer stays as it is; the exit code is then 1.
set -u

file=${1:-$(dirname "$0")/../.env}
code=0
for image in $(sed -n 's/^[A-Z_]*_IMAGE=\([^@]*\).*/\1/p' "$file"); do
	digest=$(timeout 60 docker buildx imagetools inspect "$image" --format '{{.Manifest.Digest}}')
	case $digest in
	sha256:*)
		sed -i "s|^\([A-Z_]*_IMAGE=$image\)\(@.*\)\?\$|\1@$digest|" "$file"
		echo "$image@$digest"
		;;
	*)
		echo "$image is not pinned" >&2
		code=1
		;;
	esac
done
exit $code
