"""HTTP: connections, the application, the OpenAPI document and the page."""
