"""A page in a browser, as a reader uses it."""


class Seen:
    """A page, every request that it made, and every complaint in its console."""

    def __init__(self, browser, url, **options):
        self.requests, self.complaints = [], []
        settings = {"viewport": {"width": 1280, "height": 900}} | options
        self.context = browser.new_context(**settings)
        self.page = self.context.new_page()
        self.page.on("request", lambda r: self.requests.append(r.url))
        self.page.on("pageerror", lambda e: self.complaints.append(str(e)))
        self.page.on(
            "console", lambda m: m.type in ("error", "warning") and self.complaints.append(m.text)
        )
        self.page.goto(url)

    def text(self, selector):
        return self.page.inner_text(selector)

    def visit(self):
        """The name that the server gave to this visitor."""
        return self.page.evaluate("sessionStorage.getItem('dualfluence-visit')")

    def settled(self):
        """Until the scores of the model as it is are on the page."""
        self.page.wait_for_selector("#helpful > *", timeout=60_000)
        self.page.wait_for_selector("body:not(.stale):not([aria-busy])", timeout=60_000)

    def history(self, length):
        self.page.wait_for_function(
            "n => document.querySelectorAll('#history li').length === n", arg=length
        )
        self.settled()

    def ask(self, q):
        self.page.fill("#query-number", str(q))
        self.page.press("#query-number", "Enter")

    def values(self):
        return [bar.inner_text() for bar in self.page.query_selector_all(".bar .value")]

    def select(self, *points):
        """By clicks on the map."""
        self.page.locator("#map").scroll_into_view_if_needed()
        for place, point in enumerate(points):
            box = self.page.locator(f"#point-{point}").bounding_box()
            modifiers = ["Shift"] if place else []
            if modifiers:
                self.page.keyboard.down("Shift")
            self.page.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
            if modifiers:
                self.page.keyboard.up("Shift")

    def selected(self):
        rings = self.page.query_selector_all("[data-ring]")
        return {int(ring.get_attribute("data-ring")) for ring in rings}
