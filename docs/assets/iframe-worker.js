// The search runs in a worker, which browsers refuse to pages that are opened as files. Here it runs in a hidden frame.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.onerror = this.onmessage = null;
      this.waiting = [];
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.appendChild(frame);
      const inside = frame.contentWindow;
      inside.document.open();
      inside.document.write(
        "<!doctype html><html><body><script>var postMessage = text => parent.dispatchEvent(" +
        'new MessageEvent("searched", {data: text})); var importScripts = (...urls) => urls.reduce((before, url) => ' +
        'before.then(() => new Promise(done => { const script = document.createElement("script"); script.src = url; ' +
        "script.onload = done; document.body.appendChild(script); })), Promise.resolve());</scr" +
        'ipt><script src="' + url + '"></scr' + "ipt></body></html>");
      inside.document.close();
      window.addEventListener("searched", event => {
        const message = new MessageEvent("message", {data: event.data});
        this.dispatchEvent(message);
        if (this.onmessage) this.onmessage(message);
      });
      this.frame = frame;
      frame.onload = () => {
        this.ready = true;
        this.waiting.forEach(text => this.hand(text));
      };
    }
    postMessage(text) {
      this.ready ? this.hand(text) : this.waiting.push(text);
    }
    hand(text) {
      this.frame.contentWindow.dispatchEvent(new MessageEvent("message", {data: text}));
    }
    terminate() {
      this.frame.remove();
    }
  };
}
