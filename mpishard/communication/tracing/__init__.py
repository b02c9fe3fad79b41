"""What ranks did, and when: spans, and the files that hold them."""
