"""What belongs to deploying flyspec: checks of manifests and images, compose's configuration."""
