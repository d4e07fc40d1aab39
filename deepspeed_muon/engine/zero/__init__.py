"""The wrappers that DeepSpeed puts around an optimizer; nothing outside of this folder touches their attributes."""
